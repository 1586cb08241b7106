"""Whether KV really reached the decode instance: verified for each request, probed where no request runs."""
