# Sourced: SOURCE_DATE_EPOCH, the moment that everything which is built claims to be of: the commit's, or outside a
# repository that of the sources.
if [ -z "${SOURCE_DATE_EPOCH:-}" ]; then
  SOURCE_DATE_EPOCH="$(git log -1 --format=%ct 2>/dev/null || stat --format=%Y pyproject.toml)"
fi
export SOURCE_DATE_EPOCH
