// Open a report in Firefox and press every tab: node firefox.mjs FIREFOX URL. Prints what it saw.
import puppeteer from "puppeteer-core";

const [executablePath, url] = process.argv.slice(2);
const browser = await puppeteer.launch({ browser: "firefox", executablePath, headless: true, timeout: 120_000 }).catch((error) => {
  console.error(String(error));
  process.exit(3); // it does not start here
});
const page = await browser.newPage();
page.setDefaultTimeout(120_000);
const [errors, requests, lengths] = [[], [], []];
page.on("console", (message) => ["error", "warn"].includes(message.type()) && errors.push(message.text()));
page.on("pageerror", (error) => errors.push(String(error)));
page.on("request", (request) => requests.push(request.url()));
await page.goto(url);
await page.waitForSelector("[role=tab]");
const tabs = await page.$$eval("[role=tab]", (all) => all.map((tab) => tab.textContent));
for (let at = 0; at < tabs.length; at++) {
  await page.click(`#tab${at}`);
  lengths.push(await page.$eval(`#panel${at}`, (panel) => panel.innerText.length));
}
await browser.close();
console.log(JSON.stringify({ tabs, errors, requests, lengths }));
