"""Measuring: ops and whole denoisers against eager on a real GPU, bits first; the records are evidence."""
