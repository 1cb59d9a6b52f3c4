import type { Metadata, Viewport } from "next";
import localFont from "next/font/local";
import type { ReactNode } from "react";
import { Nav } from "@/components/nav";
import { THEME_SCRIPT } from "@/components/theme";
import "./globals.css";

const inter = localFont({
  src: "../node_modules/@fontsource-variable/inter/files/inter-latin-wght-normal.woff2",
  variable: "--font-inter", weight: "100 900", display: "optional",
});
const newsreader = localFont({
  src: "../node_modules/@fontsource-variable/newsreader/files/newsreader-latin-wght-normal.woff2",
  variable: "--font-newsreader", weight: "200 800", display: "optional",
});

export const metadata: Metadata = {
  title: { default: "XSAKE: sparse attention for JAX, measured", template: "%s · XSAKE" },
  description: "Sparse attention for JAX that computes only the blocks it was asked to, and shows what it left out.",
  icons: { icon: "/icon.svg" },
};

export const viewport: Viewport = {
  themeColor: [
    { media: "(prefers-color-scheme: light)", color: "#fbfaf6" },
    { media: "(prefers-color-scheme: dark)", color: "#141310" },
  ],
};

export default function Layout({ children }: { children: ReactNode }) {
  return (
    <html lang="en" suppressHydrationWarning className={`${inter.variable} ${newsreader.variable}`}>
      <head>
        <script dangerouslySetInnerHTML={{ __html: THEME_SCRIPT }} />
      </head>
      <body className="min-h-screen font-sans text-[0.9375rem] leading-relaxed antialiased">
        <a href="#main" className="sr-only focus:not-sr-only focus:absolute focus:z-30 focus:bg-paper focus:p-3">
          Skip to the page
        </a>
        <Nav />
        <main id="main" className="mx-auto max-w-6xl px-4 pb-24 sm:px-8">{children}</main>
        <footer className="border-t border-rule">
          <div className="mx-auto flex max-w-6xl flex-wrap gap-x-8 gap-y-2 px-4 py-8 text-sm text-muted sm:px-8">
            <p className="mr-auto max-w-xl">
              Every figure here is read from a file of the repository when the site is built. No row, no claim.
            </p>
            <p>Apache-2.0</p>
          </div>
        </footer>
      </body>
    </html>
  );
}
