//! Decides what one line of an answer says.

use iop_execution::Usage;

use crate::json::{Kind, NotJson, Scanned, Scanner, Text};

/// One line. What is not looked at (times, the model's name) is left out.
#[derive(Default)]
pub(super) struct Line<'a> {
    /// It reports an error, whatever else it holds.
    pub(super) error: bool,
    pub(super) content: Option<Text<'a>>,
    pub(super) thinking: Option<Text<'a>>,
    pub(super) calls: Vec<Call<'a>>,
    pub(super) done: bool,
    /// Why it is done; Ollama leaves an empty reason out.
    pub(super) reason: Option<Text<'a>>,
    pub(super) usage: Usage,
}

/// One whole tool call: Ollama sends none in pieces.
#[derive(Default)]
pub(super) struct Call<'a> {
    pub(super) id: Option<Text<'a>>,
    pub(super) name: Option<Text<'a>>,
    /// An object, as it stands in the line.
    pub(super) arguments: Option<&'a [u8]>,
    /// The same as a string, as servers that only look like Ollama send it.
    pub(super) arguments_text: Option<Text<'a>>,
}

/// Reads one line, which must be an object.
pub(super) fn read(bytes: &[u8]) -> Scanned<Line<'_>> {
    let mut line = Line::default();
    let mut scan = Scanner::new(bytes);
    if scan.peek()? != Kind::Object {
        return Err(NotJson);
    }
    scan.object(|scan, key| {
        match key {
            b"error" => {
                line.error |= scan.peek()? != Kind::Null;
                scan.skip()?;
            }
            b"message" => message(scan, &mut line)?,
            b"done" => line.done = scan.raw()? == b"true",
            b"done_reason" => line.reason = filled(scan.text()?),
            // Left out by Ollama when it is 0: absent is not zero.
            b"prompt_eval_count" => line.usage.input_tokens = scan.count()?,
            b"eval_count" => line.usage.output_tokens = scan.count()?,
            _ => scan.skip()?,
        }
        Ok(())
    })?;
    scan.end()?;
    Ok(line)
}

fn message<'a>(scan: &mut Scanner<'a>, line: &mut Line<'a>) -> Scanned<()> {
    scan.object(|scan, key| {
        match key {
            b"content" => line.content = filled(scan.text()?),
            b"thinking" => line.thinking = filled(scan.text()?),
            b"tool_calls" => scan.array(|scan| {
                let call = call(scan)?;
                line.calls.push(call);
                Ok(())
            })?,
            _ => scan.skip()?,
        }
        Ok(())
    })
}

fn call<'a>(scan: &mut Scanner<'a>) -> Scanned<Call<'a>> {
    let mut call = Call::default();
    scan.object(|scan, key| match key {
        b"id" => {
            call.id = filled(scan.text()?);
            Ok(())
        }
        b"function" => scan.object(|scan, key| {
            match key {
                b"name" => call.name = filled(scan.text()?),
                b"arguments" => match scan.peek()? {
                    Kind::Object => call.arguments = Some(scan.raw()?),
                    Kind::String => call.arguments_text = scan.text()?,
                    Kind::Array | Kind::Bool | Kind::Null | Kind::Number => scan.skip()?,
                },
                // `index` too: calls are numbered here, in the order they come.
                _ => scan.skip()?,
            }
            Ok(())
        }),
        _ => scan.skip(),
    })?;
    Ok(call)
}

fn filled(text: Option<Text<'_>>) -> Option<Text<'_>> {
    text.filter(|text| !text.is_empty())
}
