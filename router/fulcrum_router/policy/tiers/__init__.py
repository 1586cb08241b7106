"""What tiers and tenants get: admission, reserves, rate limits and fairness."""
