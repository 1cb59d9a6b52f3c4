import type { Metadata } from "next";
import { Suspense } from "react";
import { PageHead } from "@/components/page_head";
import { endToEnd, ladders, planLosses, rows } from "@/lib/data";
import { Benchmarks } from "@/components/benchmarks";

export const metadata: Metadata = { title: "Benchmarks" };

export default function Page() {
  return (
    <>
      <PageHead eyebrow="Benchmarks" title="Comparison with peers">
        <p>
          Sides of a comparison are interleaved in one run on one machine, and every result is checked before it is
          timed. Results where a peer is faster are included.
        </p>
      </PageHead>
      <Suspense>
        <Benchmarks rows={rows.filter(({ row }) => row.experiment !== "anatomy")} ladders={ladders} endToEnd={endToEnd} planLosses={planLosses} />
      </Suspense>
    </>
  );
}
