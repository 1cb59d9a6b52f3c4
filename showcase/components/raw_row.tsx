"use client";
import { useEffect, useRef } from "react";
import { address } from "@/lib/words";

/** A row as it stands in its file, on top of the page. */
export function RawRow({ id, value, onClose }: { id: string; value: unknown; onClose: () => void }) {
  const dialog = useRef<HTMLDialogElement>(null);
  useEffect(() => dialog.current?.showModal(), []);
  const [file, line] = id.split(":");
  return (
    <dialog ref={dialog} onClose={onClose} aria-labelledby="raw-title"
      onClick={(event) => event.target === dialog.current && dialog.current?.close()}
      className="card m-auto max-h-[85vh] w-[min(48rem,92vw)] overflow-auto p-6 text-ink backdrop:bg-black/40">
      <div className="flex items-baseline gap-4">
        <h2 id="raw-title" className="mr-auto text-xl">{file}, line {line}</h2>
        <a className="link text-sm" href={address(`/data/rows/${file}`)} download>download</a>
        <button type="button" className="button" onClick={() => dialog.current?.close()}>Close</button>
      </div>
      <pre tabIndex={0} aria-label="The row" className="mt-4 overflow-x-auto rounded bg-blank p-4 font-mono text-xs" data-raw>
        {JSON.stringify(value, null, 1)}
      </pre>
    </dialog>
  );
}
