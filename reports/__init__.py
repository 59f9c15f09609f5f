"""What a run leaves behind: ``report.json`` and everything that is derived from it."""
