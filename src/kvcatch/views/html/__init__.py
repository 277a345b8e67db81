"""The report: one HTML file without network, from one recording."""
