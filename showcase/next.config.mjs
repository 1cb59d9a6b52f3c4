/** Static files only: any host can serve them, and `xsake serve --showcase` does. */
export default {
  output: "export",
  trailingSlash: true,
  basePath: process.env.NEXT_PUBLIC_BASE ?? "",
  images: { unoptimized: true },
  poweredByHeader: false,
  reactStrictMode: true,
  devIndicators: false,
  generateBuildId: () => "xsake", // the same sources make the same addresses
  typescript: { ignoreBuildErrors: true }, // `npm run types` checks them, once
};
