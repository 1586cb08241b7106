"""What tiers and tenants get: admission, reserves, rate limits and fairness.

Pure. Journeys ask through `JourneyContext`; the order of waiting requests is `policy.waiting`'s.
"""
