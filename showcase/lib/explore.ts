"use client";
// Loads what Explore shows, layer by layer and only when it is looked at.
import { useCallback, useEffect, useRef, useState } from "react";
import { Head, inflated, unpack } from "./blocks";
import { address } from "./words";

export interface Explored {
  folder: string;
  model: { name: string; layers: number; q_heads: number };
  document: { name: string; tokens: number };
  context: number;
  block: number;
  n: number;
  always: { sinks: number; locals: number };
  policies: string[];
  percents: number[];
  profile: { documents: number; commit: string };
  environment: { cpu: string; utc: string; commit: string };
  command: string;
  entropy: number[][];
  whole: Record<string, { kl: number[]; mass: number[]; recall: number[] }>;
  copy: { tokens: number; passage: string; without: number[][]; with: number[][]; heads: number[] };
}

const place = (name: string) => address(`/data/explore/${name}.bin.gz`);
const pause = () => new Promise((resolve) => setTimeout(resolve));

/** Heads of the document, by number; those of a layer come together. */
export class Library {
  readonly heads = new Map<number, Head>();
  private readonly asked = new Map<number, Promise<void>>();

  constructor(private readonly about: Explored) {}

  layer(number: number): Promise<void> {
    const known = this.asked.get(number);
    if (known) return known;
    const made = this.read(number);
    this.asked.set(number, made);
    made.catch(() => this.asked.delete(number));
    return made;
  }

  private async read(layer: number): Promise<void> {
    const { n, model } = this.about;
    const packed = unpack(await inflated(place(`layer_${String(layer).padStart(2, "0")}`)), model.q_heads, n);
    for (let head = 0; head < model.q_heads; head++) {
      this.heads.set(layer * model.q_heads + head, new Head(packed, head));
      await pause(); // a slow machine stays responsive
    }
  }
}

export function useLibrary(about: Explored) {
  const library = useRef<Library>(null);
  library.current ??= new Library(about);
  const [version, setVersion] = useState(0);
  const [problem, setProblem] = useState<string | null>(null);
  const load = useCallback((layers: number[]) => {
    let isWanted = true;
    const next = async () => {
      for (const layer of layers) {
        if (!isWanted) return;
        await library.current!.layer(layer);
        setVersion((x) => x + 1);
      }
    };
    next().catch((error) => setProblem(String(error)));
    return () => { isWanted = false; };
  }, []);
  return { heads: library.current.heads, version, load, problem };
}

/** Blocks of every head, by policy and percent. */
export function useTotals(about: Explored) {
  const [totals, setTotals] = useState<Uint16Array | null>(null);
  useEffect(() => {
    inflated(place("totals")).then((bytes) => setTotals(new Uint16Array(bytes.buffer, bytes.byteOffset, bytes.length / 2)))
      .catch(() => setTotals(null));
  }, []);
  const all = about.model.layers * about.model.q_heads;
  return useCallback((policy: number, percent: number, head: number) => {
    if (!totals) return null;
    return totals[(policy * about.percents.length + (percent - about.percents[0])) * all + head];
  }, [totals, about, all]);
}

/** The heads that carry a copied passage, as they saw the document that ends with one. */
export function useCarriers(about: Explored, isWanted: boolean) {
  const [heads, setHeads] = useState<Head[] | null>(null);
  useEffect(() => {
    if (!isWanted) return;
    const count = about.copy.heads.length;
    inflated(place("copy")).then((bytes) => {
      const packed = unpack(bytes, count, about.n);
      setHeads(Array.from({ length: count }, (_, head) => new Head(packed, head)));
    }).catch(() => setHeads(null));
  }, [about, isWanted]);
  return heads;
}
