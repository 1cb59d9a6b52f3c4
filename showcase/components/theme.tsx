"use client";
import { useEffect, useState } from "react";

/** Runs before anything is painted, so that a dark room stays dark. */
export const THEME_SCRIPT =
  "try{var t=localStorage.getItem('theme')}catch(e){}" +
  "document.documentElement.dataset.theme=t==='dark'||t==='light'?t:" +
  "matchMedia('(prefers-color-scheme: dark)').matches?'dark':'light'";

export function ThemeButton() {
  const [theme, setTheme] = useState<string | null>(null);
  useEffect(() => setTheme(document.documentElement.dataset.theme ?? "light"), []);
  const other = theme === "dark" ? "light" : "dark";
  const turn = () => {
    document.documentElement.dataset.theme = other;
    try {
      localStorage.setItem("theme", other);
    } catch {
      // a browser that keeps nothing still changes the page
    }
    setTheme(other);
    window.dispatchEvent(new Event("themechange"));
  };
  return (
    <button type="button" onClick={turn} className="rounded p-1.5 text-muted sm:p-2 hover:text-ink" aria-label={`Use ${other} colours`}>
      <svg width="18" height="18" viewBox="0 0 18 18" aria-hidden="true">
        <circle cx="9" cy="9" r="7" fill="none" stroke="currentColor" strokeWidth="1.5" />
        <path d="M9 2a7 7 0 0 1 0 14z" fill="currentColor" />
      </svg>
    </button>
  );
}
