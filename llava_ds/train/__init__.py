"""What trains, at which rate, and the loop."""
