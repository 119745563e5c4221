"""The workers behind a gateway: requests to them, and what is known of each."""
