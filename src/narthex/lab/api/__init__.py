"""The lab's Kubernetes API, without a network: objects and their versions, and what the API says to a request.

`kinds` what there is, `registry` what is held.
"""
