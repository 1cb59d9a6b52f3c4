"use client";
import Link from "next/link";
import { usePathname } from "next/navigation";
import { ThemeButton } from "./theme";

const ROOMS = [
  ["/explore/", "Explore HADS"],
  ["/benchmarks/", "Benchmarks"],
  ["/training/", "Training"],
  ["/proof/", "Proof"],
];

export function Nav() {
  const path = usePathname();
  return (
    <header className="sticky top-0 z-20 border-b border-rule bg-paper/95 backdrop-blur-sm">
      <nav aria-label="Rooms" className="mx-auto flex max-w-6xl items-center gap-0.5 px-4 sm:px-8">
        <Link prefetch={false} href="/" className="mr-auto py-3 pr-2 font-serif text-xl font-medium tracking-tight"
          aria-current={path === "/" ? "page" : undefined}>
          XSAKE
        </Link>
        <ul className="flex overflow-x-auto text-xs sm:text-sm">
          {ROOMS.map(([place, name]) => (
            <li key={place}>
              <Link prefetch={false} href={place} aria-current={path === place ? "page" : undefined}
                className="block border-b-2 border-transparent px-1 py-3.5 whitespace-nowrap text-muted hover:text-ink aria-[current=page]:border-accent aria-[current=page]:text-ink sm:px-3">
                {name === "Explore HADS" ? (<><span className="hidden sm:inline">Explore HADS</span><span className="sm:hidden">Explore</span></>) : name}
              </Link>
            </li>
          ))}
        </ul>
        <ThemeButton />
      </nav>
    </header>
  );
}
