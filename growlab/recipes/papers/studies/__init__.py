"""Experiments other than training one network on images: each is a function and a file in conf/experiment."""
