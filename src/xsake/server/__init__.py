"""The dashboard: reads runs, plans, rows and certificates, serves them, and changes nothing."""
