"""The host loop: requests, scheduler, step programs, speculation, sampling, constraints."""
