import type { Metadata } from "next";
import { Suspense } from "react";
import { PageHead } from "@/components/page_head";
import { endToEnd, ladders, planLosses, rows } from "@/lib/data";
import { Benchmarks } from "@/components/benchmarks";

export const metadata: Metadata = { title: "Benchmarks" };

export default function Page() {
  return (
    <>
      <PageHead eyebrow="Benchmarks" title="Beside the others, row by row">
        <p>
          Both sides of a comparison take turns in one run on one machine, and every result is checked before its time
          counts. Where a peer is faster, it says so.
        </p>
      </PageHead>
      <Suspense>
        <Benchmarks rows={rows.filter(({ row }) => row.experiment !== "anatomy")} ladders={ladders} endToEnd={endToEnd} planLosses={planLosses} />
      </Suspense>
    </>
  );
}
