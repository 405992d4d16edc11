"""The workbench: it explains, measures and checks attention calls. The library never imports it."""
