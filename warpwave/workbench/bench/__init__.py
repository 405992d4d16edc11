"""The benchmark: cases as data, peers as small functions, one timing method, and records with full provenance."""
