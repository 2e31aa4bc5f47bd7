"""Scan on XLA devices: the body becomes HLO, the scan one ``While`` around it."""
