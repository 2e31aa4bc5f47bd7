"""Which steps run as one scan, and which of them are recomputed: each strategy is nested scans."""
