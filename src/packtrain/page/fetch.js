// Questions to the server of a page, which answers in JSON. `{"error": "text"}` and OpenAI's `{"error": {"message": "text"}}`
// are errors.

export class Failure extends Error {
  constructor(status, message) {
    super(message);
    this.status = status; // 0: no answer at all
  }
}

export async function fetchJson(url, options, unreachable) {
  let response;
  try {
    response = await fetch(url, options);
  } catch (error) {
    if (error.name === "AbortError") throw error;
    throw new Failure(0, unreachable);
  }
  const body = await response.json().catch(() => null);
  if (response.ok && body) return body;
  const wait = response.status === 429 && response.headers.get("Retry-After");
  const message = body?.error?.message ?? body?.error ?? `The server answered ${response.status}.`;
  throw new Failure(response.status, wait ? `${message} Try again in ${wait} s.` : message);
}
