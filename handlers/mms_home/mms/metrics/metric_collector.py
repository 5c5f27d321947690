"""Multi Model Server runs this once a minute for metrics that nobody reads here."""
