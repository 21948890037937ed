"""Experiments that are not the training of one network on images: each is one function, one file in conf/experiment."""
