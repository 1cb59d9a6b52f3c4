import type { Metadata } from "next";
import { Missing, PageHead } from "@/components/page_head";
import { certificates, faults, numerics, type Certificate, type Outcome } from "@/lib/data";
import { address, bytes, commit, count, day, percent } from "@/lib/words";

export const metadata: Metadata = { title: "Proof" };

const took = (found: Outcome[]) => found.filter(({ verdict }) => verdict === "compiled").length;

function Targets() {
  return (
    <div className="relative overflow-x-auto" tabIndex={0} role="region" aria-label="Certificates by target">
      <table className="table">
        <thead>
          <tr><th>target</th><th>compiles</th><th>controls rejected</th><th>unexpected</th><th>compiler</th><th>commits</th><th>date</th><th>file</th></tr>
        </thead>
        <tbody className="number">
          {certificates.map((each) => {
            const expected = each.outcomes.filter(({ expects }) => expects === "compiles");
            const controls = each.outcomes.filter(({ expects }) => expects === "refused");
            const odd = each.outcomes.filter(({ as_expected }) => !as_expected);
            return (
              <tr key={each.file} data-target={each.target}>
                <td><strong className="font-medium">{each.target}</strong> <span className="text-muted">{each.device_kind}</span></td>
                <td data-compiled>{took(expected)} of {expected.length}</td>
                <td>{controls.filter(({ verdict }) => verdict === "refused").length} of {controls.length}</td>
                <td className={odd.length ? "text-accent" : ""}>{odd.length}</td>
                <td className="text-muted">{each.compiler}</td>
                <td className="font-mono text-xs">{each.commits.map(commit).join(", ")}</td>
                <td className="whitespace-nowrap">{day(each.made_at)}</td>
                <td><a className="link" href={address(`/data/${each.file}`)}>JSON<span className="sr-only"> of {each.target}</span></a></td>
              </tr>
            );
          })}
        </tbody>
      </table>
    </div>
  );
}

function cell(found: Certificate, shape: string, pass: string) {
  const own = found.outcomes.filter((x) => x.shape === shape && x.pass === pass && x.expects === "compiles");
  if (!own.length) return <span className="text-muted">not tried</span>;
  const memory = own.flatMap(({ vmem_bytes }) => vmem_bytes ?? []);
  return (
    <>
      {took(own)} of {own.length}
      {memory.length > 0 && <span className="block text-xs text-muted">up to {bytes(Math.max(...memory))} {found.family === "tpu" ? "VMEM" : "shared"}</span>}
    </>
  );
}

function Shapes() {
  const cases = certificates.flatMap(({ outcomes }) => outcomes.filter(({ expects }) => expects === "compiles"));
  const kinds = [...new Set(cases.map(({ shape, pass }) => `${shape}|${pass}`))].sort();
  return (
    <div className="relative overflow-x-auto" tabIndex={0} role="region" aria-label="Cases by model and pass">
      <table className="table">
        <thead>
          <tr><th>heads of</th><th>pass</th>{certificates.map(({ target }) => <th key={target}>{target}</th>)}</tr>
        </thead>
        <tbody className="number">
          {kinds.map((kind) => {
            const [shape, pass] = kind.split("|");
            return (
              <tr key={kind}>
                <td>{shape.replaceAll("_", " ")}</td><td>{pass}</td>
                {certificates.map((each) => <td key={each.target}>{cell(each, shape, pass)}</td>)}
              </tr>
            );
          })}
        </tbody>
      </table>
    </div>
  );
}

function Numerics() {
  if (!numerics) return <Missing what="Errors have not been measured here" command="python -m benchmarks.experiments.numerics" />;
  return (
    <>
      <p className="mt-2 max-w-2xl text-muted">
        Outputs and gradients compared with a float64 oracle that shares no code with the library. The error budget is
        derived from rounding at that precision.
      </p>
      <div className="relative mt-4 overflow-x-auto" tabIndex={0} role="region" aria-label="Errors by implementation">
        <table className="table max-w-3xl">
          <thead><tr><th>implementation</th><th>dtype</th><th>arrays compared</th><th>within the budget</th><th>max. used</th></tr></thead>
          <tbody className="number">
            {numerics.groups.map((each) => (
              <tr key={`${each.implementation} ${each.dtype}`} data-numerics={`${each.implementation} ${each.dtype}`}>
                <td>{each.implementation}</td><td>{each.dtype}</td><td>{count(each.rows)}</td><td>{count(each.within)}</td>
                <td>{percent(each.most, 0)}</td>
              </tr>
            ))}
          </tbody>
        </table>
      </div>
      <a className="link mt-3 inline-block text-sm" href={address(`/data/rows/${numerics.file}`)}>all rows</a>
    </>
  );
}

function Faults() {
  if (!faults) {
    return (
      <Missing what="The fault matrix has not been run for this build" command={"just faults          # writes benchmarks/results/faults.json\njust showcase        # and the table appears here"}>
        Kills, flipped bits, full disks, hung and lost processes, injected into real runs. The results file is missing in this
        build.
      </Missing>
    );
  }
  return (
    <div className="relative overflow-x-auto" tabIndex={0} role="region" aria-label="Faults">
      <p className="mb-3 text-sm text-muted">
        {faults.faults.filter(({ is_met }) => is_met).length} of {faults.faults.length} checks passed; {faults.environment.cpu},{" "}
        {day(faults.environment.utc)}, commit {commit(faults.environment.commit)}{faults.is_quick ? ", a quick run with few trials" : ""}.
      </p>
      <table className="table">
        <thead><tr><th>no.</th><th>fault</th><th>survived when</th><th>trials passed</th><th>timed</th><th>median</th><th>95%</th><th>date</th></tr></thead>
        <tbody className="number">
          {faults.faults.map((each) => (
            <tr key={each.fault} data-fault={each.fault}>
              <td className="text-muted">{each.fault}</td><td>{each.name}</td><td className="text-muted">{each.gate}</td>
              <td className={each.is_met ? "" : "text-accent"}>{each.passes} of {each.n}</td><td className="text-muted">{each.timed}</td>
              <td>{each.seconds_p50 === null ? "–" : `${each.seconds_p50} s`}</td><td>{each.seconds_p95 === null ? "–" : `${each.seconds_p95} s`}</td>
              <td className="whitespace-nowrap">{each.utc ? day(each.utc) : "–"}</td>
            </tr>
          ))}
        </tbody>
      </table>
    </div>
  );
}

export default function Proof() {
  return (
    <>
      <PageHead eyebrow="Proof" title="What is verified, and what is not">
        <p>
          No accelerator was available. Claims about accelerators are limited to the output of their compilers, recorded
          case by case with the compiler version.
        </p>
      </PageHead>
      <section aria-labelledby="certificates">
        <h2 id="certificates" className="text-3xl">Certificates</h2>
        <p className="mt-2 mb-4 max-w-2xl text-muted">
          These kernels were compiled by Google&apos;s compiler for TPUs and by NVIDIA&apos;s for GPUs, on a machine without
          either. Controls are cases that must be rejected. The kernels were never run on the devices; their speed is
          unknown.
        </p>
        {certificates.length ? <Targets /> : <Missing what="There are no certificates" command="xsake certify" />}
        {certificates.length > 0 && (
          <details className="mt-6">
            <summary className="link inline-block">By model and pass</summary>
            <div className="mt-4"><Shapes /></div>
          </details>
        )}
      </section>
      <section aria-labelledby="faults" className="mt-16">
        <h2 id="faults" className="mb-4 text-3xl">Faults injected into real runs</h2>
        <Faults />
      </section>
      <section aria-labelledby="numerics" className="mt-16">
        <h2 id="numerics" className="text-3xl">Errors</h2>
        <Numerics />
      </section>
    </>
  );
}
