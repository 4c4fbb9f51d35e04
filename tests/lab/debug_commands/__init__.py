"""Commands of tutorials about kube-proxy: their scenario (`walks.yaml`), how it is run in labs, and the page made of it."""
