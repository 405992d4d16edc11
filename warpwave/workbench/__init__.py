"""What explains, measures and checks attention calls. Nothing outside of this package imports it."""
