// A Chromium that the machine already has; none is downloaded.
import { existsSync } from "node:fs";
import { chromium } from "playwright-core";

const NAMES = ["/usr/bin/chromium", "/usr/bin/chromium-browser", "/usr/bin/google-chrome"];

export const program = () => NAMES.find((path) => existsSync(path)) ?? null;

export const SIZES = { phone: { width: 390, height: 844 }, desktop: { width: 1440, height: 900 } };

export async function browser() {
  return chromium.launch({ executablePath: program(), args: ["--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage"] });
}
