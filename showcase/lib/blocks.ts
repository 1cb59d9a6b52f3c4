// Blocks of heads as benchmarks/hads/explored.py packs them, and what choices keep of them.
// Every figure is a ratio of whole numbers, so that it equals what the Python side computes.

/** Some heads: masses as 16-bit codes and the place of each block in its row, hidden half left out. */
export interface Packed {
  n: number;
  heads: number;
  codes: Uint16Array;
  places: Uint8Array;
}

export interface Kept {
  kl: number;
  mass: number;
  recall: number;
  blocks: number;
}

export const start = (row: number) => (row * (row + 1)) / 2;

export function unpack(bytes: Uint8Array, heads: number, n: number): Packed {
  const size = heads * start(n);
  if (bytes.length !== 3 * size) throw new Error(`${bytes.length} bytes are not ${heads} heads of ${n} rows`);
  const codes = new Uint16Array(size);
  for (let i = 0; i < size; i++) codes[i] = bytes[i] + 256 * bytes[size + i];
  return { n, heads, codes, places: bytes.slice(2 * size) };
}

/** When the words are on the screen: what is only drawn comes after them. Hidden pages never paint, and do not wait. */
const painted = () => new Promise<void>((done) => {
  requestAnimationFrame(() => setTimeout(done));
  setTimeout(done, 1000);
});

/** A file as it is stored, whether or not a host has already undone its gzip. */
export async function inflated(address: string, signal?: AbortSignal): Promise<Uint8Array> {
  await painted();
  const answer = await fetch(address, { signal, priority: "low" });
  if (!answer.ok) throw new Error(`${address}: ${answer.status}`);
  const bytes = new Uint8Array(await answer.arrayBuffer());
  if (bytes[0] !== 0x1f || bytes[1] !== 0x8b) return bytes;
  const stream = new Blob([bytes]).stream().pipeThrough(new DecompressionStream("gzip"));
  return new Uint8Array(await new Response(stream).arrayBuffer());
}

/** Blocks of each row of a head that computes `total`: the same number everywhere, the rest to the last rows. */
export function rowCounts(total: number, n: number, always: number): Uint16Array {
  const cost = (k: number) => k * n - (k * (k - 1)) / 2;
  let level = Math.min(always, n);
  while (level < n && cost(level + 1) <= total) level++;
  const left = total - cost(level), counts = new Uint16Array(n);
  for (let row = 0; row < n; row++) counts[row] = Math.min(row + 1, level) + (row >= n - left ? 1 : 0);
  return counts;
}

/** What one head can keep: running sums of its rows in the selector's order, and in that of true masses. */
export class Head {
  readonly n: number;
  readonly codes: Uint16Array;
  readonly places: Uint8Array;
  private readonly kept: Float64Array; // [row][k]: sum of the first k blocks
  private readonly best: Float64Array; // the same, heaviest blocks first
  private readonly agreed: Uint16Array; // [row][k]: of the first k, those that are among the k heaviest

  constructor(packed: Packed, head: number) {
    const { n } = packed, size = start(n);
    this.n = n;
    this.codes = packed.codes.subarray(head * size, (head + 1) * size);
    this.places = packed.places.subarray(head * size, (head + 1) * size);
    this.kept = new Float64Array(n * (n + 1));
    this.best = new Float64Array(n * (n + 1));
    this.agreed = new Uint16Array(n * (n + 1));
    for (let row = 0; row < n; row++) this.add(row);
  }

  private add(row: number): void {
    const { n, codes, places, kept, best, agreed } = this, first = start(row), at = row * (n + 1);
    const order = Array.from({ length: row + 1 }, (_, j) => j);
    order.sort((a, b) => codes[first + b] - codes[first + a] || a - b);
    order.forEach((column, rank) => {
      const place = places[first + column];
      kept[at + place + 1] += codes[first + column];
      best[at + rank + 1] += codes[first + column];
      agreed[at + Math.max(place, rank) + 1] += 1;
    });
    for (let k = 1; k <= n; k++) {
      kept[at + k] += kept[at + k - 1];
      best[at + k] += best[at + k - 1];
      agreed[at + k] += agreed[at + k - 1];
    }
  }

  keeps(total: number, always: number): Kept {
    const { n, kept, agreed } = this, counts = rowCounts(total, n, always);
    let kl = 0, mass = 0, right = 0;
    for (let row = 0; row < n; row++) {
      const at = row * (n + 1), share = kept[at + counts[row]] / kept[at + n];
      kl -= Math.log(share);
      mass += share;
      right += agreed[at + counts[row]];
    }
    return { kl: kl / n, mass: mass / n, recall: right / total, blocks: total };
  }

  /** Kept mass at every constant number of blocks per row: by the selector, and by the true masses. */
  curve(always: number): { share: number; selected: number; best: number }[] {
    const { n, kept, best } = this, points = [];
    for (let level = always; level <= n; level++) {
      const total = level * n - (level * (level - 1)) / 2;
      let selected = 0, most = 0;
      for (let row = 0; row < n; row++) {
        const at = row * (n + 1), k = Math.min(row + 1, level);
        selected += kept[at + k] / kept[at + n];
        most += best[at + k] / best[at + n];
      }
      points.push({ share: total / start(n), selected: selected / n, best: most / n });
    }
    return points;
  }
}

/** Shares of mass on the passage that rows of a copy keep: source blocks of every row but the first. */
export function carriedMass(head: Head, total: number, always: number, copied: number) {
  const { n, codes, places } = head, first = n - copied, counts = rowCounts(total, n, always);
  let all = 0, kept = 0;
  for (let row = first + 1; row < n; row++) {
    for (const column of [row - first, row - first + 1]) {
      const block = start(row) + column;
      all += codes[block];
      if (places[block] < counts[row]) kept += codes[block];
    }
  }
  return { kept, all };
}
