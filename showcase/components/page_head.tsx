import type { ReactNode } from "react";

export function PageHead({ eyebrow, title, children }: { eyebrow: string; title: string; children: ReactNode }) {
  return (
    <div className="pt-10 pb-8 sm:pt-16">
      <p className="eyebrow">{eyebrow}</p>
      <h1 className="mt-2 max-w-3xl text-4xl leading-[1.08] sm:text-5xl">{title}</h1>
      <div className="lede mt-5">{children}</div>
    </div>
  );
}

/** A room without its data says how to make it. */
export function Missing({ what, command, children }: { what: string; command: string; children?: ReactNode }) {
  return (
    <div className="card p-6 sm:p-8" data-missing>
      <h2 className="text-xl">{what}</h2>
      {children && <div className="mt-2 max-w-2xl text-muted">{children}</div>}
      <pre tabIndex={0} className="mt-4 overflow-x-auto rounded bg-blank p-4 font-mono">{command}</pre>
    </div>
  );
}
