// The built site on a free port of this machine, as a plain static host would serve it.
import { createReadStream, existsSync, statSync } from "node:fs";
import { createServer } from "node:http";
import { extname, join, resolve } from "node:path";
import { createGzip } from "node:zlib";

const KINDS = { ".html": "text/html; charset=utf-8", ".js": "text/javascript", ".css": "text/css", ".json": "application/json",
  ".svg": "image/svg+xml", ".woff2": "font/woff2", ".txt": "text/plain", ".gz": "application/gzip", ".jsonl": "application/jsonl" };
const SMALL = new Set([".html", ".js", ".css", ".json", ".txt", ".svg"]);

export async function serve(folder) {
  const root = resolve(folder);
  const server = createServer((request, response) => {
    let path = join(root, decodeURIComponent(new URL(request.url, "http://x").pathname));
    if (existsSync(path) && statSync(path).isDirectory()) path = join(path, "index.html");
    if (!path.startsWith(root) || !existsSync(path)) {
      response.writeHead(404).end("nothing here");
      return;
    }
    const kind = extname(path), headers = { "content-type": KINDS[kind] ?? "application/octet-stream", "cache-control": "max-age=600" };
    if (SMALL.has(kind) && /gzip/.test(request.headers["accept-encoding"] ?? "")) {
      response.writeHead(200, { ...headers, "content-encoding": "gzip" });
      createReadStream(path).pipe(createGzip()).pipe(response);
    } else {
      response.writeHead(200, headers);
      createReadStream(path).pipe(response);
    }
  });
  await new Promise((done) => server.listen(0, "127.0.0.1", done));
  return { place: `http://127.0.0.1:${server.address().port}`, close: () => server.close() };
}
