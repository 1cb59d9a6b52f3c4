"use client";
import { useSearchParams } from "next/navigation";
import { useEffect, useMemo, useState } from "react";
import type { EndToEnd, Ladder, Row } from "@/lib/data";
import { Choice } from "./choice";
import { Memory } from "./memory";
import { Quality } from "./quality";
import { RawRow } from "./raw_row";
import { Speed } from "./speed";

const ROOMS = [["speed", "Speed"], ["memory", "Memory and growth"], ["quality", "Quality"]] as const;
type Room = (typeof ROOMS)[number][0];

export function Benchmarks({ rows, ladders, endToEnd }: { rows: Row[]; ladders: Ladder[]; endToEnd: EndToEnd[] }) {
  const asked = useSearchParams();
  const [room, setRoom] = useState<Room>("speed");
  const [open, setOpen] = useState<string | null>(null);
  const known = useMemo(() => new Map<string, unknown>([
    ...rows.map(({ id, row }) => [id, row] as const),
    ...ladders.flatMap((each) => each.rows.map((row) => [row.id, row] as const)),
    ...endToEnd.map((row) => [row.id, row] as const),
  ]), [rows, ladders, endToEnd]);
  useEffect(() => {
    const wanted = asked.get("row"), named = asked.get("room");
    if (wanted && known.has(wanted)) setOpen(wanted);
    if (wanted?.startsWith("hads/end_to_end") || wanted?.startsWith("hads/ladder")) setRoom("quality");
    else if (ROOMS.some(([name]) => name === named)) setRoom(named as Room);
  }, [asked, known]);
  return (
    <>
      <Choice name="room" label="What" options={ROOMS} value={room} onChange={setRoom} />
      <div className="mt-8">
        {room === "speed" && <Speed rows={rows} onOpen={setOpen} />}
        {room === "memory" && <Memory rows={rows} onOpen={setOpen} />}
        {room === "quality" && <Quality ladders={ladders} endToEnd={endToEnd} onOpen={setOpen} />}
      </div>
      {open && known.has(open) && <RawRow key={open} id={open} value={known.get(open)} onClose={() => setOpen(null)} />}
    </>
  );
}
