"""Pods of a Kubernetes cluster: the fleet, the API server it talks to, and the manifests it creates."""
