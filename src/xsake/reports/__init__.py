"""Reports: HTML pages that need no network and no script, and plots in one palette."""
