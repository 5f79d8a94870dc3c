"""What test modules share. Each file gives one thing; no test module imports another."""
