"""`vlm-serve bench`: what an endpoint's user waits for, beside a peer if there is one."""
