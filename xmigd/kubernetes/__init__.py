"""The adapter to Kubernetes, a process of its own on each node: `xmig-kubernetes`. docs/kubernetes.md has the whole."""
