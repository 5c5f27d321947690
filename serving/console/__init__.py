"""The console: a web page at `/` that shows, calls, loads and unloads models.

The files of `page/` are served unchanged: no build step, nothing from another host.
"""
