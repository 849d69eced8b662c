"""Worker threads, processes and Ray actors of a run: start, calls, health checks, replacement and end."""
