// The view is in the address after `#`, so that a link shows to another person what this one sees:
// `#/run/en-de-1/curves?with=en-de-2&x=time&smooth=0.6`

export function parse(hash) {
  const [path, query = ""] = hash.replace(/^#/, "").split("?");
  const parts = path.split("/").filter(Boolean).map(decoded);
  const [page = "runs", name = "", tab = ""] = parts;
  return { page, name, tab, query: new URLSearchParams(query) };
}

function decoded(part) {
  try {
    return decodeURIComponent(part);
  } catch {
    return part; // a lone % is no reason to show nothing
  }
}

export function address({ page, name = "", tab = "", query = {} }) {
  const path = [page === "runs" ? "" : page, name, tab].filter(Boolean).map(encodeURIComponent).join("/");
  const pairs = query instanceof URLSearchParams ? query : new URLSearchParams(Object.entries(query).filter(([, one]) => one));
  // A comma and a slash may stand in a query as they are; so the link stays readable.
  const text = pairs.toString().replaceAll("%2C", ",").replaceAll("%2F", "/").replaceAll("%3A", ":");
  return `#/${path}${text ? `?${text}` : ""}`;
}

export const current = () => parse(location.hash);

// Changes the query of this view without a new entry in the history: a slider would leave hundreds.
export function adjust(changes) {
  const route = current();
  for (const [name, value] of Object.entries(changes)) {
    if (value === null || value === undefined || value === "" || value === false) route.query.delete(name);
    else route.query.set(name, String(value));
  }
  history.replaceState(null, "", address(route));
}

export const listed = (query, name) => (query.get(name) ?? "").split(",").filter(Boolean);
