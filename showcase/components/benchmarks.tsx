"use client";
import { useSearchParams } from "next/navigation";
import { useEffect, useMemo, useState } from "react";
import type { EndToEnd, Ladder, PlanLoss, Row } from "@/lib/data";
import { Choice } from "./choice";
import { Memory } from "./memory";
import { Quality } from "./quality";
import { RawRow } from "./raw_row";
import { Speed } from "./speed";

const ROOMS = [["speed", "Speed"], ["memory", "Memory and growth"], ["quality", "Quality"]] as const;
type Room = (typeof ROOMS)[number][0];

interface Measured {
  rows: Row[];
  ladders: Ladder[];
  endToEnd: EndToEnd[];
  planLosses: PlanLoss[];
}

export function Benchmarks({ rows, ladders, endToEnd, planLosses }: Measured) {
  const asked = useSearchParams();
  const [room, setRoom] = useState<Room>("speed");
  const [open, setOpen] = useState<string | null>(null);
  const known = useMemo(() => new Map<string, unknown>([
    ...rows.map(({ id, row }) => [id, row] as const),
    ...ladders.flatMap((each) => each.rows.map((row) => [row.id, row] as const)),
    ...[...endToEnd, ...planLosses].map((row) => [row.id, row] as const),
  ]), [rows, ladders, endToEnd, planLosses]);
  useEffect(() => {
    const rowId = asked.get("row"), named = asked.get("room");
    if (rowId && known.has(rowId)) setOpen(rowId);
    if (/^hads\/(end_to_end|ladder|plan_loss)/.test(rowId ?? "")) setRoom("quality");
    else if (ROOMS.some(([name]) => name === named)) setRoom(named as Room);
  }, [asked, known]);
  return (
    <>
      <Choice name="room" label="What" options={ROOMS} value={room} onChange={setRoom} />
      <div className="mt-8">
        {room === "speed" && <Speed rows={rows} onOpen={setOpen} />}
        {room === "memory" && <Memory rows={rows} onOpen={setOpen} />}
        {room === "quality" && <Quality rows={rows} ladders={ladders} endToEnd={endToEnd} planLosses={planLosses} onOpen={setOpen} />}
      </div>
      {open && known.has(open) && <RawRow key={open} id={open} value={known.get(open)} onClose={() => setOpen(null)} />}
    </>
  );
}
