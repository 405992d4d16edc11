"""The benchmark: cases as data, peers as small functions, one way of timing, records with everything in them."""
