"""The console: a page at `/` that shows the models, asks them and manages them.

`page/` is what the browser gets, as it is: no build step, nothing from another host.
"""
