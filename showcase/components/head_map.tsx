import type { Plan } from "@/lib/data";
import { percent } from "@/lib/words";

/** All heads of a plan: a square per head, darker for a larger share of its blocks. */
export function HeadMap({ plan }: { plan: Plan }) {
  const layers = plan.shares.length, heads = plan.shares[0].length;
  const all = plan.shares.flat();
  const least = Math.min(...all), most = Math.max(...all);
  return (
    <figure>
      <svg viewBox={`0 0 ${heads * 10} ${layers * 4}`} className="w-full" role="img"
        aria-label={`Shares of blocks of ${layers * heads} heads, from ${percent(least)} to ${percent(most)}`}>
        {plan.shares.map((layer, y) => layer.map((share, x) => (
          <rect key={`${y}/${x}`} x={x * 10 + 0.35} y={y * 4 + 0.35} width="9.3" height="3.3" fill="var(--accent)"
            opacity={(0.07 + 0.93 * share).toFixed(3)} />
        )))}
      </svg>
      <figcaption className="mt-3 text-xs text-muted">
        The plan of SmolLM2-135M: {layers} layers down, {heads} heads across, ink for the share of its blocks a head
        computes, {percent(least)} to {percent(most)}. Together {percent(plan.budget, 1)}.
      </figcaption>
    </figure>
  );
}
