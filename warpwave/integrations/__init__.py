"""Integrations with other libraries, one host a file. Importing one changes nothing in its host."""
