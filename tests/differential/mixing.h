/* What the kernels of the differential test do to one word: the same on a GPU, on a processor, and in kernels.py. */
#ifndef XMIG_DIFFERENTIAL_MIXING_H
#define XMIG_DIFFERENTIAL_MIXING_H

#ifndef MIXING
#define MIXING static inline
#endif

/* Every bit of x changes about half of the result's. */
MIXING unsigned scramble(unsigned x) {
  x = (x ^ (x >> 15)) * 0x2c1b3c6du;
  x = (x ^ (x >> 12)) * 0x297a2d39u;
  return x ^ (x >> 15);
}

/* A term of a sum that differs whenever `word` does: the factor is odd. */
MIXING unsigned term(unsigned word, unsigned k, unsigned j, unsigned salt) {
  return (word ^ (k * 0x9e3779b9u + j + salt)) * (2u * k + 1u);
}

#endif
