"""What the machine is: frozen descriptions of GPUs."""
