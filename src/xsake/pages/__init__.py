"""Self-contained HTML pages: elements, style sheet and page template."""
