// Report of the calls that a client makes: a line of JSON for each, with what was wrong.

export async function run(...calls) {
  for (const call of calls) {
    let problem = "";
    try {
      await call();
    } catch (error) {
      problem = `${error.name}: ${error.message}`;
    }
    console.log(JSON.stringify({ call: call.name, problem }));
  }
}
