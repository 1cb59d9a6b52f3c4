import type { Metadata } from "next";
import { Explore } from "@/components/explore";
import { Missing, PageHead } from "@/components/page_head";
import { explored } from "@/lib/data";

export const metadata: Metadata = { title: "Explore HADS" };

export default function Page() {
  const { reference: _, ...about } = explored ?? {};
  return (
    <>
      <PageHead eyebrow="Explore HADS" title="What heads look at, and what they can do without">
        <p>
          Head-Adaptive Dynamic Sparsity gives each head its own share of a budget. Move the budget and see which blocks
          survive in a real model that reads a text it was not calibrated on.
        </p>
      </PageHead>
      {explored ? <Explore text={JSON.stringify(about)} />
        : <Missing what="No document has been explored" command="python -m benchmarks.hads.explore --profile profile.json" />}
    </>
  );
}
