"use client";
// Loads what Explore shows, layer by layer and only when it is looked at.
import { startTransition, useCallback, useEffect, useRef, useState } from "react";
import { Head, inflated, unpack, type Packed } from "./blocks";
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
  opening: { percent: number; totals: number[][] }; // blocks of every head by policy, at the budget that a visitor meets first
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

/** Heads of the document, by number. A layer is read as a whole; a head is made when it is looked at. */
export class Library {
  readonly made = new Map<number, Head>();
  private readonly read = new Map<number, Packed>();
  private readonly asked = new Map<number, Promise<void>>();

  constructor(private readonly about: Explored) {}

  layer(number: number): Promise<void> {
    const known = this.asked.get(number);
    if (known) return known;
    const { n, model } = this.about;
    const promise = inflated(place(`layer_${String(number).padStart(2, "0")}`))
      .then((bytes) => { this.read.set(number, unpack(bytes, model.q_heads, n)); });
    this.asked.set(number, promise);
    promise.catch(() => this.asked.delete(number));
    return promise;
  }

  /** A head; null while its layer is not read. */
  head(number: number): Head | null {
    const q = this.about.model.q_heads, known = this.made.get(number), packed = this.read.get(Math.floor(number / q));
    if (known || !packed) return known ?? null;
    const head = new Head(packed, number % q);
    this.made.set(number, head);
    return head;
  }
}

export function useLibrary(about: Explored) {
  const library = useRef<Library>(null);
  library.current ??= new Library(about);
  const [version, setVersion] = useState(0);
  const [problem, setProblem] = useState<string | null>(null);
  /** Reads layers; with `isEvery` it also makes all their heads, one at a time, so that a slow machine stays responsive. */
  const load = useCallback((layers: number[], isEvery = false) => {
    let isWanted = true;
    const q = about.model.q_heads;
    const next = async () => {
      for (const layer of layers) {
        await library.current!.layer(layer);
        for (let head = layer * q; isEvery && head < (layer + 1) * q; head++) {
          library.current!.head(head);
          await pause();
        }
        if (!isWanted) return;
        startTransition(() => setVersion((x) => x + 1)); // what has been read is drawn in slices
      }
    };
    next().catch((error) => setProblem(String(error)));
    return () => { isWanted = false; };
  }, [about]);
  return { library: library.current, version, load, problem };
}

/** Blocks of every head, by policy and percent. */
export function useTotals(about: Explored) {
  const [totals, setTotals] = useState<Uint16Array | null>(null);
  useEffect(() => {
    inflated(place("totals"))
      .then((bytes) => startTransition(() => setTotals(new Uint16Array(bytes.buffer, bytes.byteOffset, bytes.length / 2))))
      .catch(() => setTotals(null));
  }, []);
  const all = about.model.layers * about.model.q_heads;
  return useCallback((policy: number, percent: number, head: number) => {
    if (!totals) return percent === about.opening.percent ? about.opening.totals[policy][head] : null;
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
